"""What makes one optimizer step one compiled program."""
