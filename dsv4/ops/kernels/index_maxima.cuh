// The largest scores of every few blocks, which index_score leaves to index_select as a bound: what lies below the TOPK-th of them
// cannot be among the best.
// Given besides what index_cut.cuh wants: TOPK.
#ifndef DSV4_INDEX_MAXIMA
#define DSV4_INDEX_MAXIMA
#include "index_scores.cuh"

constexpr int STEP = 2 * TILE;  // keys of a warpgroup at a time; each lane of its four warps has one

// About WANTED to twice as many maxima, whatever the number of warpgroups: each of some or of all of a warp's steps, and of some
// or of all of the rows that its lanes have.
struct Maxima {
  static constexpr int WANTED = 2 * TOPK;
  int steps, per, rows, left;  // of all warpgroups, of one that share a maximum, rows of a warp that do; maxima
  DEVICE Maxima(int count, int groups) {
    steps = (count + STEP - 1) / STEP;
    const int active = 4 * min(groups, steps), rounds = (steps + groups - 1) / groups;
    rows = 32;
    while (rows > 1 && active * (32 / rows) < WANTED) rows /= 2;
    const int sets = rows > 1 ? 1 : min(rounds, (WANTED + active * 32 - 1) / (active * 32));
    per = (rounds + sets - 1) / sets;
    const int before = (rounds + per - 1) / per - 1;
    left = 4 * (32 / rows) * (before * groups + min(groups, steps - before * per * groups));
  }
};

#endif
