"""The demo: idle memory of one process, harvested by another, taken back and given again.

`aqua-demo` starts real processes and nothing pretends: a coordinator with its embedded Valkey, a
producer that serves images from a diffusion model, a consumer that generates text with a Llama
whose keys and values exceed its budget. Both models have random weights, since what is shown is
memory moving under them, not what they say.

Modules, from the ground up: `models`, `scale` (what runs, how large);
`messages`, `parent_death`, `child`, `processes` (how processes speak, and end); `images`,
`producer_program`, `consumer_program` (what they do); `phases`,
`orchestration` (who starts, waits and stops); `record`, `report`, `plot`, `view` (what is seen);
`planned`, `profiled` (what profiles and plans say); `cli`.

Two others have a real vLLM: `online_load` (what is asked), `engine_report` (what their reports
share). `aqua-demo co-serving`: `paused_clock`, `served_engine`, `co_serving_race` (engines by
turns), `co_serving` (who does what), `co_serving_report`, `co_serving_plot`, `co_serving_view`
(what is seen). `aqua-demo batch`: `api_server`, `batch_client` (engines and services over HTTP),
`batch` (who does what, and who dies), `batch_report`, `batch_plot`, `batch_view`.
"""
