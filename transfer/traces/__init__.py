"""Traffic as data: one record of a request, readers of public trace formats, generators of synthetic traffic.

load_trace (loading.py) is what commands call: a file of any format or `generated:NAME?...`, cut and scaled.
"""
