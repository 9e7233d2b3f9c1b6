"""The dashboard: Streamlit pages over recordings and validation reports.

Pages only arrange numbers and figures. Numbers come from `tokentwin.traces.metrics.run_metrics` and from validation
reports. Figures come from the `charts` files, which do not import Streamlit.
"""
