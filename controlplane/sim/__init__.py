"""The simulator: an event heap drives the scheduler core and the nodes' batching cores. No asyncio, sockets or clock.

The one part of the serving code that may import nodes (its pure parts: core, hardware, shapes, pool index).
"""
