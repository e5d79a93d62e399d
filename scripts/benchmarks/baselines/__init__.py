"""What kvferry is measured against, each written as well as its authors would write it.

==============  ===================================================================================================
``raw``         engine calls and nothing else, with the window that was found to be best
``limit``       what cannot be overlapped: the last layer and the unfired ones, and one round trip
``monolithic``  after the forward, one synchronous call a window, from a worker thread
``threadpool``  four workers, one event a layer group and context; asynchronous, or blocking in the call
==============  ===================================================================================================
"""
