"""What is measured and reported: metrics, readings of the machine, logs."""
