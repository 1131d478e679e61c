"""tools.report: `mend report`, a run as one HTML file.

`read` takes events and tapes from disk, `facts`, `curve` and `rounds` say what they mean, `panels`
and `timeline` draw, `page` puts it together, `words` explain.
"""
