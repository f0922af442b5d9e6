"""Know before you switch it on: what of a log of real prompts repeats, and what each mode would save.

`lines` reads files, `formats` finds prompts in what they hold, `encoding` makes token ids of them, `replay` runs those
through the engine's own index, planner, keeping rules and cost model, `tally` counts, `verdict` decides, `report` and
`picture` show it.
"""
