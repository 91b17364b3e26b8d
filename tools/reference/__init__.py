"""Prints the pages of docs/reference that come from the code: `make reference` rewrites all of them.

Each module has `page()`, the text of one page, or of a section for `ask`. Tests compare the pages with it.
"""
