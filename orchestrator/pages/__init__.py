"""Which pages of a request a chunk and a rank send. Pure numpy; nothing here knows an address or a peer.

=============  ================================================================================
ranges         the tokens each chunk makes final, in whole pages
tables         the valid head of a rectangular page table's row
ownership      the pages a context-parallel rank owns of a chunk
=============  ================================================================================

Positions are absolute pages of the request (``token // page_size``); pages are indices into a pool.
"""
