"""The demos: idle memory of one process, harvested by another, taken back and given again.

`aqua-demo` starts real processes and nothing pretends: a coordinator with its embedded Valkey, a
producer that serves images from a diffusion model, a consumer that generates text with a Llama
whose keys and values exceed its budget. The models have random weights, since what is shown is
memory moving under them, not what they say. Two others have a real vLLM.

    batch, co_serving, lending   a demo each: who does what (`run`), what is judged (`report`), seen
                                 (`view`) and drawn (`plot`)
    engines                      a vLLM that is raced or asked over HTTP, for the first two
    programs                     the models, and the two processes that have them

Beside them is what all use: `processes`, `child`, `messages` and `parent_death` (how processes
speak, and end), `claims`, `view` and `panels` (how a run is judged, watched and drawn).
"""
