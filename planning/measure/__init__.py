"""Real runs for calibration and validation: the engine is loaded, the machine is watched, whole runs are recorded."""
