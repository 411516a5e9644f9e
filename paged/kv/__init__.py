"""Pages: ids and references, tables, and the memory behind them."""
