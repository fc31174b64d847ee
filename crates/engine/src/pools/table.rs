//! The page table of a sequence: guards, and their ids as a step wants them.

use super::{Page, Pools};

/// Pages of one sequence in order: page `i` holds tokens `64 i .. 64 i + 63`. Dropping it gives all of them back.
///
/// Leading pages may be shared with other sequences ([`crate::prefix`]); a sequence writes only behind them.
#[derive(Debug, Default)]
pub struct PageTable {
    pages: Vec<Page>,
    ids: Vec<u32>,
    pub(crate) published: Published,
}

/// How much of a table is in the prefix tree.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Published {
    /// Which filling of the tree; 0 is none.
    pub(crate) generation: u64,
    /// So many leading pages are the tree's own.
    pub(crate) pages: usize,
}

impl PageTable {
    /// Ids of the pages, for [`glimmer_tensor::Step::pages`].
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// The guards.
    pub fn pages(&self) -> &[Page] {
        &self.pages
    }

    /// Number of pages.
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// How many pages other sequences hold as well: the first ones, because whoever holds a page holds those before it.
    pub fn shared(&self) -> usize {
        self.pages.partition_point(Page::has_other_holders)
    }

    /// Grows to so many pages from the free ones, or not at all: whether it has so many now.
    pub fn grow(&mut self, pools: &Pools, pages: usize) -> bool {
        let more = pages.saturating_sub(self.len());
        if more == 0 {
            return true;
        }
        let Some(taken) = pools.pages(more) else { return false };
        taken.into_iter().for_each(|page| self.push(page));
        true
    }

    /// Appends a page.
    pub fn push(&mut self, page: Page) {
        self.ids.push(page.id());
        self.pages.push(page);
    }

    /// Puts another page of equal contents in the place of one.
    pub(crate) fn exchange(&mut self, index: usize, page: Page) {
        self.ids[index] = page.id();
        self.pages[index] = page;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_with_other_holders_are_counted() {
        let pools = Pools::new(0, 0, 3);
        let (mut table, mut other) = (PageTable::default(), PageTable::default());
        assert!(table.grow(&pools, 3));
        assert_eq!(table.shared(), 0);
        table.pages()[..2].iter().for_each(|page| other.push(page.clone()));
        assert_eq!((table.shared(), other.shared()), (2, 2));
        drop(other);
        assert_eq!(table.shared(), 0);
    }

    #[test]
    fn tables_grow_to_a_size_or_not_at_all() {
        let pools = Pools::new(0, 0, 3);
        let mut table = PageTable::default();
        assert!(table.grow(&pools, 2) && table.grow(&pools, 1), "never shrinks");
        assert_eq!((table.ids(), table.len()), ([0, 1].as_slice(), 2));
        assert!(!table.grow(&pools, 4));
        assert_eq!((table.len(), pools.free().pages), (2, 1));
        drop(table);
        assert_eq!(pools.free(), pools.all());
    }
}
