"""The lease, abort, room and rollover tables, explored exhaustively (N1). See docs/model.md.

===================  ===============================================================================
module               what
===================  ===============================================================================
state                what is kept of each process, of the wires, of writes under way
bounds               the configurations: how large the explored world is
decode_rooms decode  one decode rank: its rooms and leases; links, rollovers, what may happen
prefill_rooms        one prefill rank: its rooms
prefill              one prefill rank: links, offers, sessions, what may happen
writes               what becomes of writes under way
system               all of them together: the steps that a state allows
canonical symmetry   states that behave alike are one
properties           what must hold
explore              breadth first; whether an end can be reached; the way to a violation
trace                a counterexample as one reads it
channel              the exactly-once channel by itself, over a network that loses and reorders
mutations            every single-cell change of the tables
faults               planted faults of what is no table (``faults_of_decode``, ``faults_of_prefill``)
survivors harmless   which mutations nothing notices, and why they do no harm
runner __main__      in processes of their own; the command line
===================  ===============================================================================
"""
