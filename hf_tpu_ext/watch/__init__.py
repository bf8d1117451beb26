"""What is compiled, what reads the device, and why. It listens, and executes nothing."""
