# What was run, from the root of the repository, with one process on two cores shared with other programs.
# worn.txt and healthy.txt are what the commands print; worn.jsonl.gz and healthy.jsonl.gz hold all runs.
python -m benchmarks.treat .
for name in worn healthy; do
    pliant treat $name.pt --model cnn --data benchmarks/treat.py:tonight --old-data benchmarks/treat.py:old_night \
        --epochs 8 --set training.evaluate_every=2 --seeds 5 --workers 1 --budget 45m --out runs/treat-$name > $name.txt
    pliant pack runs/treat-$name $name.jsonl.gz
done
