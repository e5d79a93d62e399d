"""The pure core: everything that must never be wrong, testable without a loop.

=============  ================================================================================
errors         one tree of exceptions; whose fault it is stands in the type
ids            room and chunk keys, incarnations, sessions
layout         what a worker's memory looks like; whether two layouts fit; pairs of buffers
blocks         page lists to (source, destination, length) blocks
planning       which source bytes of a chunk go to which bytes of a destination
coverage       what landed, told by the sender and proven by the receiver
messages       wire protocol 1 as tagged structs
codec          frames to messages and back
channel        exactly-once, in-order delivery between two incarnations
machines       the state tables: prefill room, decode room, chunk, forward pass
leases         who may write which unit, and when it is free again
window         blocks and bytes in flight
turns          whose turn it is among rooms that share a link
breaker        whether a peer that failed is tried again
grouping       how many layers to send together
linkmodel      what a link costs, learnt online
pins           which source pages may still be read
shares         a bounded table whose owners share it fairly
tombstones     the verdicts of rooms that ended
=============  ================================================================================

Nothing here starts a task, holds a lock, reads a clock, opens a socket, or imports asyncio, zmq or torch.
"""
