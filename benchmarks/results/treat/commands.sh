# What was run, from the root of the repository, with one process on two cores shared with other programs.
# worn.txt and healthy.txt are what the last commands print; worn.jsonl.gz and healthy.jsonl.gz hold all runs.
python -m benchmarks.treat .
treat() {
    pliant treat $1.pt --model cnn --data benchmarks/treat.py:tonight --old-data benchmarks/treat.py:old_night \
        --epochs 8 --set training.evaluate_every=2 --seeds 5 --workers 1 --out runs/treat-$1 "${@:2}"
}
# The first tries had budgets that left time for six settings in one round, then for one. They answered "train from
# scratch": redo(every=32, tau=0.025) ended at 38.56 %, shrink_perturb(lam=0.4) at 41.74 %. Their runs are kept too.
treat worn --budget 22m
treat worn --budget 35m
treat worn --methods 'shrink_perturb:lam=0.4|0.8,fire,head_reset' --budget none > worn.txt
# The budget left time for one setting; the second command makes its answer again with the final wording.
treat healthy --budget 22m
treat healthy --methods shrink_perturb:lam=0.4 --budget none > healthy.txt
for name in worn healthy; do pliant pack runs/treat-$name $name.jsonl.gz; done
