"""The soak: real worker processes under traffic, aborts and kills. `scripts/soak`.

================ ======================================================================================================
``content``      bytes that say where they belong, and the poison between them
``units``        which pages of a worker are free, most recently freed first
``process``      a worker process: its pipe, its signals, its end
``worker``       what every worker process runs: commands in, answers out
``decoding``     the decode worker: expects rooms, verifies every committed byte, gives pages back when they are free
``prefilling``   the prefill worker: chunked forwards that write the content layer by layer
``forwards``     the prefill worker's forward thread
``tables``       what is left in a worker's tables, and what its process has open
``plan``         which rooms there are, and what happens to them, from a seed
``verdict``      what a room's two outcomes may be, and what is a violation
``run``          the coordinator: traffic, kills, the end
``report``       the figures, as text and as JSON
================ ======================================================================================================

The worker processes serve the fault tests as well (``tests/faults``).
"""
