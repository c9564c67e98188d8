"""Serves a GGUF file by llama.cpp's own server until it is killed: `python llamacpp_serve.py FILE SLOTS`, in an
environment that has xllamacpp. Prints its address.
"""

import sys
import time

import xllamacpp

CONTEXT = 2048

params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.n_parallel = int(sys.argv[2])
params.n_ctx = CONTEXT * params.n_parallel
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.hostnames = ["127.0.0.1"]
params.port = 0
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
while True:
    time.sleep(3600)
