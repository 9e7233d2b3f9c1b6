"""The dashboard: Streamlit pages over recordings and validation reports.

Pages only arrange. Numbers come from `traces.metrics.run_metrics` and validation reports, and figures from the `charts`
files, which do not import Streamlit.
"""
