"""Every page, table, chart and text of numbers that is made from result rows."""
