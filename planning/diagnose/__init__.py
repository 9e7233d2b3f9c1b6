"""Why a run is as slow as it is: its symptoms, and what lifting one constraint at a time would buy."""
