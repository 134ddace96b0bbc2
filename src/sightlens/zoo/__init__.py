"""The shipped checkpoints, the code that trains and scores them, and a model whose circuit is written by hand."""
