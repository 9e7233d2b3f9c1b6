"""Real runs for calibration and validation: they load the engine, watch the machine, and record whole runs."""
