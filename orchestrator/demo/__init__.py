"""The language-model demo: prefill in one process, decode in another, the KV cache moved layer by layer in between.

* ``main``, ``options`` – the command line;
* ``driver`` – runs every prompt several ways and compares; ``fleet``, ``wire`` – the processes and what they say;
* ``worker``, ``prefill``, ``decode``, ``single`` – one role each, a process of its own;
* ``model``, ``prompts``, ``generate`` – the language model;
* ``verdict``, ``report``, ``picture``, ``inject`` – what was equal, how it is shown, and proof that the check can fail.

The driver never imports torch: it answers a mistake at once.
"""
