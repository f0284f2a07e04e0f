"""Solves a scheduling problem to optimality or to a proven gap.

It knows neither stages nor seconds, and is the only part of the planner that imports OR-Tools. Its words are those of
multi-mode project scheduling:

| here | in scheduling | in the planner |
|---|---|---|
| task | a job with several modes | a stage, or the memory that some devices lack |
| mode | one way to process a job, with its duration and its demands | a choice of a stage on a pool |
| resource | the machine that a mode needs; machines may overlap | ranks and the layout on them |
| activity | an operation in time: a run of a task, or a transfer between resources | a stage in a period, or a refit |
| precedence, lag | the same | an edge of the graph of stages, and the transfer of its fields |
| makespan | the same; the period, if precedences are carried to later periods | the period |
| incumbent, bound, gap | the same | the plan so far, its bound and its gap |
"""
