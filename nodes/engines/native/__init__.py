"""The torch engine: Llama-family decoders over paged KV, on CPU and CUDA by the same code.

Importing it sets how long OpenMP threads spin at a barrier, which counts only if torch is not imported yet.
"""

import os

# A step has hundreds of barriers. By default a thread spins there long enough to keep a core from the very thread it
# waits for whenever anything else runs: a step of 12 ms then takes seconds. It costs a tenth on an idle machine.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
