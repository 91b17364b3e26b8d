"""A model test: random sequences of public calls, compared with what the documents promise.

    python -m penstock.testing.model --seeds 100 --engine folder

`groups.py` and `reference.py` are the model, written from the documents and not from the code;
`sequence.py` draws and shortens sequences; `run.py` executes them; `harness.py` says how an engine is
reached, so that the same test holds for every engine to come.
"""
