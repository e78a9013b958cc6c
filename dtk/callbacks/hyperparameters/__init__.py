"""Learning rate, momentum, batch size and epochs, as callbacks read and change them."""
