#!/usr/bin/env bash
# Kills a quantize run with SIGKILL at random moments, resumes it, and compares the artifact with an undisturbed one.
#
#   benches/kill_resume.sh [KILLS=20] [GLIMMER=target/release/glimmer] [quantize arguments...]
#
# Prints one line a kill and "identical" with the number of kills at the end; exit code 1 on any difference.
set -euo pipefail
kills=${1:-20} glimmer=${2:-target/release/glimmer}
shift $(($# < 2 ? $# : 2))
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
hashes() { (cd "$1" && find . -type f | sort | xargs sha256sum); }

start=$(date +%s%N)
"$glimmer" quantize --out "$work/whole" "$@" >/dev/null 2>&1
length=$((($(date +%s%N) - start) / 1000000))
hashes "$work/whole" >"$work/whole.sha256"
echo "undisturbed: $length ms, $(wc -l <"$work/whole.sha256") files"

done_kills=0
while ((done_kills < kills)); do
  rm -rf "$work/killed"
  resume=()
  # One to three kills a run, each at a random moment of what is left of it.
  for ((i = RANDOM % 3; i >= 0 && done_kills < kills; i--)); do
    delay=$((RANDOM * 32768 + RANDOM)) && delay=$((delay % length))
    "$glimmer" quantize --out "$work/killed" "${resume[@]}" "$@" >/dev/null 2>&1 &
    pid=$!
    sleep "$(printf '%d.%03d' $((delay / 1000)) $((delay % 1000)))"
    if kill -9 $pid 2>/dev/null; then
      wait $pid 2>/dev/null || true
      done_kills=$((done_kills + 1))
      echo "kill $done_kills after $delay ms: $(find "$work/killed" -type f 2>/dev/null | wc -l) files," \
        "config.json $([[ -e $work/killed/config.json ]] && echo present || echo absent)"
      resume=(--resume)
      [[ -d $work/killed ]] || resume=()
    else
      wait $pid || true
      break
    fi
  done
  if [[ ! -e $work/killed/config.json ]] || ((${#resume[@]})); then
    "$glimmer" quantize --out "$work/killed" --resume "$@" >/dev/null 2>&1
  fi
  if ! diff <(hashes "$work/killed") "$work/whole.sha256" >"$work/diff"; then
    echo "DIFFERENT after kill $done_kills:"; head "$work/diff"; exit 1
  fi
done
echo "identical after $done_kills kills"
