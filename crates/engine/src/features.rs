//! Features of images and clips that were seen lately, by digest, so that the tower runs once for a picture that every turn
//! of a conversation repeats.
//!
//! Invariant: the features kept take at most the given number of bytes; what was used longest ago goes first. Whoever uses
//! features shares them, so eviction takes them from nobody.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use serde::{Deserialize, Serialize};

use crate::request::MediaKind;

/// Features by content.
#[derive(Debug)]
pub struct FeatureCache {
    most_bytes: usize,
    bytes: usize,
    kept: HashMap<FeatureKey, Entry>,
    /// Oldest use first.
    order: BTreeMap<u64, FeatureKey>,
    tick: u64,
    counters: FeatureCounters,
}

/// Names features: the file's SHA-256 and how it was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FeatureKey {
    /// SHA-256 of the file.
    pub digest: [u8; 32],
    /// Image or clip.
    pub kind: MediaKind,
    /// Rows; another size limit gives another number.
    pub tokens: usize,
}

/// Counts since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FeatureCounters {
    /// Look-ups.
    pub queries: u64,
    /// Look-ups that found features.
    pub hits: u64,
    /// Features given up for room.
    pub evicted: u64,
}

#[derive(Debug)]
struct Entry {
    /// `[tokens, hidden]`.
    features: Arc<[f32]>,
    used: u64,
}

impl FeatureCache {
    /// Keeps up to `most_bytes` bytes of features; 0 keeps nothing.
    pub fn new(most_bytes: usize) -> Self {
        Self {
            most_bytes,
            bytes: 0,
            kept: HashMap::new(),
            order: BTreeMap::new(),
            tick: 0,
            counters: FeatureCounters::default(),
        }
    }

    /// Features `[tokens, hidden]`, if they are kept.
    pub fn find(&mut self, key: &FeatureKey) -> Option<Arc<[f32]>> {
        self.counters.queries += 1;
        let entry = self.kept.get_mut(key)?;
        self.counters.hits += 1;
        self.tick += 1;
        self.order.remove(&entry.used);
        self.order.insert(self.tick, *key);
        entry.used = self.tick;
        Some(Arc::clone(&entry.features))
    }

    /// Keeps features `[tokens, hidden]`, unless they alone are too many bytes.
    pub fn keep(&mut self, key: FeatureKey, features: Arc<[f32]>) {
        let bytes = size_of_val(&*features);
        if bytes > self.most_bytes {
            return;
        }
        self.remove(&key);
        while self.bytes + bytes > self.most_bytes {
            let Some(oldest) = self.order.first_entry().map(|entry| *entry.get()) else { break };
            self.remove(&oldest);
            self.counters.evicted += 1;
        }
        self.tick += 1;
        self.bytes += bytes;
        self.order.insert(self.tick, key);
        self.kept.insert(key, Entry { features, used: self.tick });
    }

    /// Bytes kept.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Features kept.
    pub fn len(&self) -> usize {
        self.kept.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.kept.is_empty()
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.kept.clear();
        self.order.clear();
        self.bytes = 0;
    }

    /// Counts since the start.
    pub fn counters(&self) -> &FeatureCounters {
        &self.counters
    }

    fn remove(&mut self, key: &FeatureKey) {
        if let Some(entry) = self.kept.remove(key) {
            self.order.remove(&entry.used);
            self.bytes -= size_of_val(&*entry.features);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(digest: u8) -> FeatureKey {
        FeatureKey { digest: [digest; 32], kind: MediaKind::Image, tokens: 1 }
    }

    fn features(n: usize) -> Arc<[f32]> {
        vec![1.0; n].into()
    }

    #[test]
    fn the_least_recently_used_goes_first_and_bytes_are_bounded() {
        let mut cache = FeatureCache::new(40);
        cache.keep(key(1), features(4));
        cache.keep(key(2), features(4));
        assert!(cache.find(&key(1)).is_some());
        cache.keep(key(3), features(4));
        assert!(cache.find(&key(2)).is_none(), "2 was used longest ago");
        assert!(cache.find(&key(1)).is_some() && cache.find(&key(3)).is_some());
        assert_eq!((cache.bytes(), cache.len()), (32, 2));
        assert_eq!(*cache.counters(), FeatureCounters { queries: 4, hits: 3, evicted: 1 });
        cache.keep(key(4), features(10));
        assert_eq!((cache.bytes(), cache.len()), (40, 1));
        cache.keep(key(5), features(11));
        assert_eq!((cache.bytes(), cache.len()), (40, 1), "too large to keep evicts nothing");
        cache.clear();
        assert_eq!((cache.bytes(), cache.is_empty()), (0, true));
        cache.keep(key(1), features(10));
        assert_eq!(cache.bytes(), 40);
    }

    #[test]
    fn keeping_again_replaces() {
        let mut cache = FeatureCache::new(100);
        cache.keep(key(1), features(4));
        cache.keep(key(1), features(5));
        assert_eq!((cache.bytes(), cache.len(), cache.find(&key(1)).map(|f| f.len())), (20, 1, Some(5)));
        assert_eq!(cache.counters().evicted, 0);
    }

    #[test]
    fn a_file_read_as_a_clip_or_at_another_size_is_another() {
        let mut cache = FeatureCache::new(100);
        cache.keep(key(1), features(4));
        assert!(cache.find(&FeatureKey { kind: MediaKind::Video, ..key(1) }).is_none());
        assert!(cache.find(&FeatureKey { tokens: 2, ..key(1) }).is_none());
    }

    #[test]
    fn features_in_use_survive_eviction() {
        let mut cache = FeatureCache::new(16);
        cache.keep(key(1), features(4));
        let used = cache.find(&key(1)).unwrap();
        cache.keep(key(2), features(4));
        assert!(cache.find(&key(1)).is_none());
        assert_eq!(used.len(), 4);
    }

    proptest::proptest! {
        #[test]
        fn agrees_with_a_list_in_order_of_use(
            most in 0usize..12,
            actions in proptest::collection::vec((0u8..6, 1usize..6, proptest::bool::ANY), 1..200),
        ) {
            let mut cache = FeatureCache::new(4 * most);
            let mut list: Vec<(u8, usize)> = Vec::new();
            for (digest, size, find) in actions {
                let at = list.iter().position(|e| e.0 == digest);
                if find {
                    let found = cache.find(&key(digest)).map(|f| f.len());
                    proptest::prop_assert_eq!(found, at.map(|i| list[i].1));
                    if let Some(i) = at {
                        let used = list.remove(i);
                        list.push(used);
                    }
                } else if size <= most {
                    cache.keep(key(digest), features(size));
                    list.retain(|e| e.0 != digest);
                    while list.iter().map(|e| e.1).sum::<usize>() + size > most {
                        list.remove(0);
                    }
                    list.push((digest, size));
                } else {
                    cache.keep(key(digest), features(size));
                }
                proptest::prop_assert_eq!(cache.bytes(), 4 * list.iter().map(|e| e.1).sum::<usize>());
                proptest::prop_assert_eq!(cache.len(), list.len());
            }
        }
    }
}
