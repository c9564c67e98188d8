"""Traffic as data: one record of a request, readers of public trace formats, generators of synthetic traffic."""
