from results.pages import write
from results.studies import draw

for changed in (*write(), *draw()):
    print(changed)
