"""Turns plans into what runs, and back: values for Kubernetes, drift, and the walk over steps.

`positions` says where groups are after each step, `mapping` what a plan does not know of a cluster,
`kubernetes` joins the two into values of the chart. `sightings` is what the coordinator sees,
`drift` compares. `journal`, `hook` and `walk` carry a re-placement out.
"""
