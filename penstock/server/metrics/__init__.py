"""Numbers about a running broker.

`counters` counts what happens, `engine_stats` reads the engine's own figures, `pressure` keeps the recent
past for the dashboard and the doctor, and `prometheus` exports all of them. A new metric is counted or
read in one of the first three and listed in `prometheus`.
"""
