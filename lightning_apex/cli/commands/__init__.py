"""One module a command, with the function that it is made from."""
