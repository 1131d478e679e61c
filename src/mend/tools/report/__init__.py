"""tools.report: `mend report` writes a run as one HTML file.

`read` reads events, `rounds` tapes; `facts` and `curve` keep their figures; `summary` puts them
into words, `charts` and `lanes` into lines and bars, and `page` puts all together.
"""
