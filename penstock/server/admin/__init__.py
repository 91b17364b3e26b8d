"""The HTTP API for operators and probes: one file for each resource, named as in its URL.

`http` serves the app, `endpoint` and `request` turn HTTP requests into administrative requests and their
answers into JSON, `gate` decides who may ask for what, and `openapi` describes it all. A new resource is a
new file here, with its routes added in `http`.
"""
