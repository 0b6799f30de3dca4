"""The data plane: router worker processes on uvloop, outliving the server that started them."""
