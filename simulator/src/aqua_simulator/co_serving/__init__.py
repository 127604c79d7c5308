"""One engine that serves online and offline requests together, on a virtual clock."""
