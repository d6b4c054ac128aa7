"""The parts of the HTML page: markup, the strip of layers, one step, the timeline, and the template with its style."""
