"""What this device can do, measured before it joins. What uses the measurements is elsewhere."""
