"""What the processes of the demos do: an image service that lends, a Llama that borrows."""
