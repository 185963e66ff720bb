# What was run, from the root of the repository, with one process on two cores shared with other programs.
# worn.jsonl.gz and healthy.jsonl.gz hold all runs.
python -m benchmarks.treat .
for name in worn healthy; do
    pliant treat $name.pt --model cnn --data benchmarks/treat.py:tonight --old-data benchmarks/treat.py:old_night \
        --epochs 8 --set training.evaluate_every=2 --seeds 5 --workers 1 --budget 45m --out runs/treat-$name
    pliant pack runs/treat-$name $name.jsonl.gz
done

# worn.txt and healthy.txt are what a later version prints from these runs, which it finds done. The checkpoints were
# made again. One run of each was made again too, and gave the same results in all digits that are kept. The time that
# the search expects is that of a busier machine.
for name in worn healthy; do
    pliant unpack $name.jsonl.gz runs/treat-$name
    pliant treat $name.pt --model cnn --data benchmarks/treat.py:tonight --old-data benchmarks/treat.py:old_night \
        --epochs 8 --set training.evaluate_every=2 --seeds 5 --workers 1 --budget none --out runs/treat-$name > $name.txt
done
