# Made by these commands, from the root of the repository, on one core of a busy machine.
python -m benchmarks.treat .
for name in worn healthy; do
    pliant treat $name.pt --model cnn --data benchmarks/treat.py:tonight --old-data benchmarks/treat.py:old_night \
        --epochs 8 --set training.evaluate_every=2 --seeds 5 --budget 22m --workers 1 --out runs/treat-$name > $name.txt
    cp runs/treat-$name/treatment.html $name.html
    pliant pack runs/treat-$name $name.jsonl.gz
done
