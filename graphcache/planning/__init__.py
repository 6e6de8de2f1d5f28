"""Planning from traffic: numpy at most, no torch."""
