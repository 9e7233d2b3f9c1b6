"""Answers: documents, the reports that show them, and the media that draw reports."""
