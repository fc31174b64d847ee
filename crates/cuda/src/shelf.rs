//! Which steps are kept, without a word about how.
//!
//! A step of a key is noted when it comes for the first time and made into something that can be repeated when it comes again
//! with the same notes. Were the notes others, the key says too little about its steps, and they are never kept.

use std::{collections::HashMap, hash::Hash};

/// Notes `N` of steps and what was made of them, `K`, by key.
#[derive(Debug)]
pub(crate) struct Shelf<Key, N, K> {
    entries: HashMap<Key, Entry<N, K>>,
    most: usize,
    now: u64,
}

#[derive(Debug)]
struct Entry<N, K> {
    place: Place<N, K>,
    /// When it was last of use.
    used: u64,
}

#[derive(Debug)]
enum Place<N, K> {
    Noted(N),
    Kept(K),
    /// Steps of this key differ.
    Varies,
}

impl<Key: Clone + Eq + Hash, N: PartialEq, K> Shelf<Key, N, K> {
    /// Room for `most` keys.
    pub(crate) fn new(most: usize) -> Self {
        Self { entries: HashMap::new(), most: most.max(1), now: 0 }
    }

    /// What was kept for the key.
    pub(crate) fn find(&mut self, key: &Key) -> Option<&mut K> {
        self.now += 1;
        let entry = self.entries.get_mut(key)?;
        entry.used = self.now;
        match &mut entry.place {
            Place::Kept(kept) => Some(kept),
            Place::Noted(_) | Place::Varies => None,
        }
    }

    /// Takes the notes of a step of the key; `make` makes of them what is kept, if they are those of the last one.
    ///
    /// # Errors
    /// Those of `make`; the key is then as if it had never been seen.
    pub(crate) fn put<E>(&mut self, key: Key, notes: N, make: impl FnOnce(&N) -> Result<K, E>) -> Result<(), E> {
        self.now += 1;
        let place = match self.entries.remove(&key).map(|entry| entry.place) {
            None => Place::Noted(notes),
            Some(Place::Noted(before)) if before == notes => Place::Kept(make(&notes)?),
            Some(Place::Noted(_) | Place::Varies) => Place::Varies,
            Some(kept @ Place::Kept(_)) => kept,
        };
        if self.entries.len() >= self.most {
            let oldest = self.entries.iter().min_by_key(|(_, entry)| entry.used).map(|(key, _)| key.clone());
            oldest.and_then(|key| self.entries.remove(&key));
        }
        self.entries.insert(key, Entry { place, used: self.now });
        Ok(())
    }

    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        self.entries.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(shelf: &mut Shelf<u32, &'static str, usize>, key: u32, notes: &'static str) {
        shelf.put(key, notes, |notes| Ok::<_, ()>(notes.len())).unwrap();
    }

    #[test]
    fn a_step_is_kept_when_it_was_the_same_twice() {
        let mut shelf = Shelf::new(4);
        assert!(shelf.find(&1).is_none());
        put(&mut shelf, 1, "abc");
        assert!(shelf.find(&1).is_none());
        put(&mut shelf, 1, "abc");
        assert_eq!(shelf.find(&1), Some(&mut 3));
        assert!(shelf.find(&2).is_none());
    }

    #[test]
    fn a_key_whose_steps_differ_is_never_kept() {
        let mut shelf = Shelf::new(4);
        for notes in ["abc", "abd", "abd", "abd"] {
            put(&mut shelf, 1, notes);
            assert!(shelf.find(&1).is_none());
        }
    }

    #[test]
    fn what_was_not_used_for_longest_goes_first() {
        let mut shelf = Shelf::new(2);
        for key in [1, 1, 2, 2] {
            put(&mut shelf, key, "abc");
        }
        assert!(shelf.find(&1).is_some());
        put(&mut shelf, 3, "x");
        assert!(shelf.find(&1).is_some() && shelf.find(&2).is_none());
        shelf.clear();
        assert!(shelf.find(&1).is_none());
    }

    #[test]
    fn what_cannot_be_made_leaves_nothing_behind() {
        let mut shelf: Shelf<u32, &str, usize> = Shelf::new(2);
        put(&mut shelf, 1, "abc");
        assert_eq!(shelf.put(1, "abc", |_| Err("no room")), Err("no room"));
        put(&mut shelf, 1, "abc");
        assert!(shelf.find(&1).is_none());
        put(&mut shelf, 1, "abc");
        assert!(shelf.find(&1).is_some());
    }
}
