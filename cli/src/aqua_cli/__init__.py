"""What all commands of Aqua share, and the `aqua` command that finds them."""
