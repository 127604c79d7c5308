"""The order in which a batch's requests go to engines: BlendServe's, found by a program beside."""
