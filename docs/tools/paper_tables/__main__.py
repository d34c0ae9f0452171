from paper_tables.generate import write

write()
