from results.pages import write

for changed in write():
    print(changed)
